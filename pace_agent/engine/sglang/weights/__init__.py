"""New weights on their way into servers: kept as a folder, checked against the model, sent in one of three ways."""
