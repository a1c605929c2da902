"""The steps of a plan: who shares a task, which ranks fit, who neighbours whom, and what round one starts from."""

from atlas_fl.phases.connect import connect as connect
from atlas_fl.phases.cut import cuts_while_planning as cuts_while_planning
from atlas_fl.phases.cut import decide as decide
from atlas_fl.phases.fit import Fitted as Fitted
from atlas_fl.phases.fit import fit_ranks as fit_ranks
from atlas_fl.phases.fit import measure_layers as measure_layers
from atlas_fl.phases.fit import own_importance as own_importance
from atlas_fl.phases.identify import Identified as Identified
from atlas_fl.phases.identify import fingerprints as fingerprints
from atlas_fl.phases.identify import how_taken as how_taken
from atlas_fl.phases.identify import identify as identify
from atlas_fl.phases.identify import report_of as report_of
from atlas_fl.phases.leakage import CutLeakage as CutLeakage
from atlas_fl.phases.leakage import every_cut as every_cut
from atlas_fl.phases.leakage import leakage_of as leakage_of
from atlas_fl.phases.start import warm_start as warm_start
