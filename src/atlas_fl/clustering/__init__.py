"""Phase 1: sketches of fingerprints, the similarity of clients, and their clusters."""

from atlas_fl.clustering.clusters import cluster as cluster
from atlas_fl.clustering.clusters import oracle as oracle
from atlas_fl.clustering.later import with_client as with_client
from atlas_fl.clustering.methods import METHODS as METHODS
from atlas_fl.clustering.pca import embed as embed
from atlas_fl.clustering.report import agreement as agreement
from atlas_fl.clustering.report import purity_warnings as purity_warnings
from atlas_fl.clustering.report import summarise_clusters as summarise_clusters
from atlas_fl.clustering.result import Clustering as Clustering
from atlas_fl.clustering.result import Placement as Placement
from atlas_fl.clustering.result import placed as placed
from atlas_fl.clustering.result import predict as predict
from atlas_fl.clustering.settings import Settings as Settings
from atlas_fl.clustering.similarity import corrected_similarity as corrected_similarity
from atlas_fl.clustering.similarity import cross_similarity as cross_similarity
from atlas_fl.clustering.sketch import sketch as sketch
from atlas_fl.clustering.stability import UNDECIDED as UNDECIDED
from atlas_fl.clustering.stability import stable_labels as stable_labels
