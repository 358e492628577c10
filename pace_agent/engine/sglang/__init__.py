"""The production engine: SGLang servers over HTTP, one or many.

`engine` is the engine, `fleet` looks after its servers, `turn` is one turn over as many attempts as it takes, `client`
one server's HTTP, `stream` what a generation streams back, `transports` how weights get there. Importing this package
loads neither httpx nor torch.
"""
