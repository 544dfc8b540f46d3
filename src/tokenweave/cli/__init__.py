"""The command line: one module a subcommand, each with ``add_parser(subparsers)`` and ``run(args) -> int``."""
