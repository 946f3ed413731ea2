"""The audit of the report's printed numbers: `./inv check-published`; rules in docs/audit.md.

Promise: needs no run.  Each module holds rules of one kind, each a function from the published
numbers to findings; result.py puts them together and compares them with the expected verdicts.
Limit: what is not printed cannot be audited, and is named as such.
"""
