"""The runtime's subcommands, one a module."""
