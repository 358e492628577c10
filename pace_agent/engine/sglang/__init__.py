"""The production engine: SGLang servers over HTTP, one or many.

`engine` is the engine, `client` one server's HTTP, `stream` what a generation streams back, `turn` one turn over as many
attempts as it takes, `servers` who may serve, `transports` how weights get there. Importing this package loads neither
httpx nor torch.
"""
