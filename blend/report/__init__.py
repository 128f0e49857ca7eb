"""Measurements -> `summarise` (methods compared record by record) -> a table, a JSON file and a picture."""

from blend.report.compare import summarise
from blend.report.document import report_document, write_json
from blend.report.measurement import QUALITY_METRICS, Measurement
from blend.report.picture import write_picture
from blend.report.summary import MethodSummary, Report, RunInfo
from blend.report.table import render_report, report_text

__all__ = [
    "QUALITY_METRICS",
    "Measurement",
    "MethodSummary",
    "Report",
    "RunInfo",
    "render_report",
    "report_document",
    "report_text",
    "summarise",
    "write_json",
    "write_picture",
]
