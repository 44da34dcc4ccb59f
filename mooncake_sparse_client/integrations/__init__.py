"""Ready-made bridges between the client and inference libraries; each wants its own extra to be installed."""
