"""The command line: ``demo`` shows the client at work, ``explain`` what a put keeps, ``serve`` runs a Mooncake to
develop against, ``bench`` measures."""
