"""The command line: the only package that prints.

In: words. Out: an exit code.
Not here: work; commands call the packages below.
"""
