"""The command line: thin, one file a command; everything it does can be called from Python as well."""
