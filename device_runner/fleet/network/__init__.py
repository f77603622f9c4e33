"""How tasks and answers travel: Flower's SuperLink and SuperNodes, keys and certificates."""
