"""Prompts and the traffic made of them: loading, splitting, driving a server, measuring its answers."""
