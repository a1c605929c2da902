"""`report.html`: one page of a run or of several, with everything that it needs inside.

In: run folders. Out: the text of an HTML page with tables and Vega-Lite charts, and their numbers.
Not here: the same charts as files (`report.figures`), and anything that changes a run.
"""
