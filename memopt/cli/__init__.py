"""The commands; the only owner of a console and of exit codes."""
