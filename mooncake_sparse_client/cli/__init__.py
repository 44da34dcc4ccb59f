"""The command line: ``demo`` shows the client at work, ``serve`` runs a Mooncake to develop against."""
