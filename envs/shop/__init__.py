"""Shop: look up hidden prices, add them up."""
