"""Servers and routers as processes of this machine: started, watched, started again, and stopped with their owner."""
