"""The production engine: SGLang servers over HTTP, one or many.

`engine` is the engine, `fleet` looks after its servers, `turn` is one turn over as many attempts as it takes, `client`
one server's HTTP, `stream` what a generation streams back. `weights/` is how weights get there, `serving/` how servers
and routers are started. Importing this package loads neither httpx nor torch.
"""
