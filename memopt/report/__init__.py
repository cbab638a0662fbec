"""Plans and regions as people read them: pure functions from a plan or a graph to rich renderables or plain values."""

from memopt.report.advice import advice_of
from memopt.report.notes import notes_of
from memopt.report.offload import offloads_nothing
from memopt.report.page import plan_report
from memopt.report.picture import check_picture, timeline_html
from memopt.report.regions import regions_report, regions_values
from memopt.report.render import WIDTH, rendered, rendered_html, rendered_svg
from memopt.report.summary import plan_summary

__all__ = [
    "WIDTH",
    "advice_of",
    "check_picture",
    "notes_of",
    "offloads_nothing",
    "plan_report",
    "plan_summary",
    "regions_report",
    "regions_values",
    "rendered",
    "rendered_html",
    "rendered_svg",
    "timeline_html",
]
