"""memopd-trace: record, check, score and train on the model calls of agents that rewrite their context."""

__version__ = "0.1.0"
