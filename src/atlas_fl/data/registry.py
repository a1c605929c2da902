"""TASKS: the registered tasks by name, and those that a user brings (`--task`)."""

from collections.abc import Sequence

from atlas_fl.data.chat_tasks import CHAT_TASKS
from atlas_fl.data.embedded import EMBEDDED
from atlas_fl.data.federations import FEDERATIONS
from atlas_fl.data.hub import HUB_TASKS
from atlas_fl.data.image_sets import VISION
from atlas_fl.data.task import Task
from atlas_fl.data.user_files import parse_tasks, split_description
from atlas_fl.errors import ConfigError, check_known

TASKS: dict[str, Task] = {task.name: task for task in (*EMBEDDED, *FEDERATIONS, *CHAT_TASKS, *HUB_TASKS, *VISION)}


def find_tasks(names: Sequence[str], descriptions: Sequence[str] = ()) -> tuple[Task, ...]:
    """The tasks of these names, followed by the user's own that no name asked for.

    `descriptions` are such as `name=path,text=..` (`data.user_files.parse_tasks`); the name of one with task= stands
    for all its tasks. A `ConfigError` names a task that nothing defines, that is named twice, or that takes the name of
    a registered one.
    """
    brought: dict[str, Task] = {}
    by_description: dict[str, list[str]] = {}
    for description in descriptions:
        for task in parse_tasks(description):
            if task.name in TASKS or task.name in brought:
                raise ConfigError(f"there is a task {task.name!r} already; give yours another name")
            brought[task.name] = task
            by_description.setdefault(split_description(description)[0], []).append(task.name)
    tasks = {**TASKS, **brought}
    names = [task for name in names for task in ([name] if name in tasks else by_description.get(name, [name]))]
    task_names = (*names, *(name for name in brought if name not in names))
    for index, name in enumerate(task_names):
        check_known("task", name, among=tasks)
        if name in task_names[:index]:
            raise ConfigError(f"task {name!r} is named twice; name it once and raise --clients-per-task")
    if not task_names:
        raise ConfigError(f"no task is named; known: {', '.join(sorted(tasks))}")
    return tuple(tasks[name] for name in task_names)


def check_one_kind(tasks: Sequence[Task]) -> None:
    """Check that all tasks have texts, or all have images.

    Raises:
        ConfigError: some have images and others texts, which no one model reads.
    """
    images = [task.name for task in tasks if task.images]
    texts = [task.name for task in tasks if not task.images]
    if images and texts:
        raise ConfigError(
            f"--tasks has images ({', '.join(images)}) and texts ({', '.join(texts)}); no model reads both: run them"
            " apart"
        )
