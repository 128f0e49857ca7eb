"""Spreadsheets and tables: every value as a person sees it in its cell.

Read `sheets` (a sheet as Markdown), then a reader that fills it: `xlsx` or `ods`. `number_formats` shows a number by the format
of its cell. `delimited` reads CSV, `columns` Parquet and Feather. In: the bytes of a file. Out: Markdown tables.
"""
