"""The report of a run: what was trained, what it saved against its dense twin, and what may not be claimed."""

from sparsam.report.claims import Comparison
from sparsam.report.load import ReportError
from sparsam.report.write import Report, read, write

__all__ = ["Comparison", "Report", "ReportError", "read", "write"]
