"""The commands of the command line, one module each: SUMMARY, USAGE, `add_arguments(parser)`, `run(args) -> exit code`.

Nothing heavy is imported when these modules are: `iglens --help` and a wrong argument need no torch.
"""
