"""Stock transformers as frozen backbones."""

from atlas_fl.models.registry import MODELS as MODELS
