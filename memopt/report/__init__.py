"""Plans as people read them: pure functions from a plan to rich renderables or plain values."""

from memopt.report.notes import notes_of
from memopt.report.page import plan_report
from memopt.report.render import WIDTH, rendered, rendered_html, rendered_svg
from memopt.report.summary import plan_summary

__all__ = ["WIDTH", "notes_of", "plan_report", "plan_summary", "rendered", "rendered_html", "rendered_svg"]
