"""All that is used of Flower, which is an extra."""

from atlas_fl.errors import ConfigError

try:
    from flwr.app import ConfigRecord as ConfigRecord
    from flwr.app import Context as Context
    from flwr.app import Error as Error
    from flwr.app import Message as Message
    from flwr.app import MessageType as MessageType
    from flwr.app import RecordDict as RecordDict
    from flwr.clientapp import ClientApp as ClientApp
    from flwr.common.config import get_project_dir as get_project_dir
    from flwr.serverapp import Grid as Grid
    from flwr.serverapp import ServerApp as ServerApp
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("flwr"):
        raise
    raise ConfigError("Flower is not installed here; it is an extra: pip install 'atlas-fl[flower]'") from None
