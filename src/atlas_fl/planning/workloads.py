"""What differs between adapters and whole models beside training itself: how they travel, and who can take part.

A run's rounds, rules, records, resume and audit are the same code for both (`Site.trainable`).
"""

from atlas_fl.config import Config
from atlas_fl.events import OnEvent, PhaseStarted, ignore
from atlas_fl.models.backbone import Backbone
from atlas_fl.params import digest
from atlas_fl.planning.masks import check_heads
from atlas_fl.planning.plan import Plan
from atlas_fl.planning.planner import local_engine, plan_for
from atlas_fl.planning.ranks_and_cuts import cuts_while_planning
from atlas_fl.runtime.protocol.full_model_sync import Common, WholeReceiver, WholeSender, parted
from atlas_fl.runtime.protocol.model_sync import AdapterReceiver, AdapterSender, NewSender, Receiver
from atlas_fl.setup.assembly import Assembly, assemble, put_off, trained_body
from atlas_fl.setup.options import drawn_of
from atlas_fl.sparse.masks import Mask


def whole_sender(backbone: Backbone, config: Config, *, keeps: bool, mask: Mask | None = None) -> NewSender:
    """Senders of whole models to ends that keep what they trained last, or not; `mask` where there is one already."""
    known = None if mask is None else parted(mask)[0]
    common = Common(home=digest(trained_body(backbone, config)), mask=known, drawn=drawn_of(config))
    return lambda: WholeSender(common=common, counts_on_trained=keeps)


def whole_receiver(backbone: Backbone, config: Config, *, keeps_trained: bool) -> WholeReceiver:
    """The end of a client or worker to which whole models are sent."""
    return WholeReceiver(
        home=trained_body(backbone, config), keeps_trained=keeps_trained, trains_heads=backbone.vision is None
    )


def worker_sender(assembly: Assembly) -> NewSender:
    """How jobs are sent to the workers of this assembly."""
    if not assembly.is_full:
        return AdapterSender
    return whole_sender(assembly.site.backbone, assembly.config, keeps=False)


def worker_receiver(assembly: Assembly) -> Receiver:
    """The end of a worker that has assembled the run."""
    if not assembly.is_full:
        return AdapterReceiver()
    return whole_receiver(assembly.site.backbone, assembly.config, keeps_trained=False)


def check_clients(assembly: Assembly) -> None:
    """Raise an `AtlasError` where clients of an assembly cannot take part, as far as that can be told at once."""
    if assembly.is_full:
        check_heads(assembly)
    else:
        cuts_while_planning(assembly)


def make_plan(config: Config, *, on_event: OnEvent = ignore) -> Plan:
    """The plan of this config: what takes passes over the clients' data is done, nothing is trained federally."""
    on_event(PhaseStarted("loading"))
    assembly = put_off(assemble(config))
    return plan_for(assembly, local_engine(assembly, on_event), on_event=on_event).plan
