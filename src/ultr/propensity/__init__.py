"""The position bias of a log, from the log alone: estimates, how well they are identified, a verdict."""

from ultr.propensity.audit import BiasReport, audit
from ultr.propensity.identification import Estimate, Verdict

__all__ = ["BiasReport", "Estimate", "Verdict", "audit"]
