"""The command line; it answers at once, because torch is loaded only by the commands that train."""
