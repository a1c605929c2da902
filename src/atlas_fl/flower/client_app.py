"""Flower ClientApp: registers, and then works over the stream until the run ends, all within one message."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atlas_fl.cli.display import show, show_progress
from atlas_fl.deployment.consent import SiteChoices, choices_of
from atlas_fl.errors import UNTOLD, AtlasError
from atlas_fl.flower import messages

FAILED = 2
"""Flower's code for an error of a ClientApp."""

Reply = Mapping[str, Any]


def who(_: messages.app.Message, context: messages.app.Context) -> Reply:
    """This node's name in the federation, once its settings have been read."""
    return {"name": messages.node_of(context.node_config, node_id=context.node_id).name}


def work(message: messages.app.Message, context: messages.app.Context) -> Reply:
    """The result of this node at the end of the run."""
    from atlas_fl.config import load_config, pinned_config  # a question needs no torch
    from atlas_fl.deployment.site import SiteOptions, join_federation

    node = messages.node_of(context.node_config, node_id=context.node_id)
    pinned = None if node.config is None else pinned_config(load_config(node.config))
    to = Path(node.to or f"{node.name}-adapter") / str(context.run_id)  # a folder for each run
    invitation = message.content[messages.RECORD]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as in `atlas join`
    with tempfile.TemporaryDirectory(prefix="atlas-") as folder, show_progress() as on_event:
        messages.write_certs(invitation, Path(folder))
        joined = join_federation(
            SiteOptions(
                **{**choices_of(SiteChoices, node), "to": str(to)},
                address=str(invitation["address"]),
                certs=Path(folder),
                token=str(invitation["token"]),
                config=pinned,
            ),
            on_event=on_event,
        )
    return {
        "name": joined.name,
        "adapter": str(joined.adapter or ""),
        "sent-bytes": joined.sent_bytes,
        "received-bytes": joined.received_bytes,
    }


def answering(
    handler: Callable[[messages.app.Message, messages.app.Context], Reply],
) -> Callable[[messages.app.Message, messages.app.Context], messages.app.Message]:
    """The handler as Flower calls it: what a user can mend goes back as an error of one line."""

    def answer(message: messages.app.Message, context: messages.app.Context) -> messages.app.Message:
        try:
            return messages.app.Message(
                messages.app.RecordDict({messages.RECORD: messages.app.ConfigRecord(dict(handler(message, context)))}),
                reply_to=message,
            )
        except AtlasError as error:
            show([f"atlas: {error}"])
            reason = str(error) if handler is who else UNTOLD
            return messages.app.Message(messages.app.Error(code=FAILED, reason=reason), reply_to=message)

    return answer


app = messages.clientapp.ClientApp()
app.query()(answering(who))
app.train()(answering(work))
