"""An independent witness: every round recomputed in dense float64, and every digest checked.

Nothing here uses the server's own code for mixing; that is the point.
"""

from atlas_fl.audit.check import audit as audit
from atlas_fl.audit.models import read_audited as read_audited
from atlas_fl.audit.report import AuditReport as AuditReport
from atlas_fl.audit.report import AuditRow as AuditRow
from atlas_fl.audit.report import RoundSummary as RoundSummary
