import pytest

from atlas_fl.cli.catalogue import CATALOGUES
from atlas_fl.config import Config, settings, validate, with_values
from atlas_fl.config.conflicts import conflicts, flag_of
from atlas_fl.config.presets import presets
from atlas_fl.data.registry import TASKS
from atlas_fl.errors import ConfigError
from atlas_fl.methods.registry import METHODS, RULES
from atlas_fl.models.registry import MODELS
from atlas_fl.ranks.devices import DEVICES, parse_device

REGISTRIES = {
    **{"tasks": TASKS, "models": MODELS, "devices": DEVICES, "presets": presets()},
    "strategies": [*RULES, *METHODS],
}


@pytest.mark.parametrize("what", REGISTRIES)
def test_the_list_holds_every_entry_once(what: str, atlas) -> None:
    said = atlas("list", what)
    first = [line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")]
    assert said.code == 0
    assert first[1:] == list(REGISTRIES[what])


@pytest.mark.parametrize("what", REGISTRIES)
def test_in_eighty_columns_no_word_is_broken(what: str, atlas, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    words = sorted(atlas("list", what).out.split())
    monkeypatch.setenv("COLUMNS", "80")
    said = atlas("list", what).out
    assert max(map(len, said.splitlines())) <= 80
    assert sorted(said.split()) == words
    assert len(said.splitlines()) < 8 * len(REGISTRIES[what])


def test_a_line_of_the_devices_makes_a_profile(atlas) -> None:
    header, *lines = (line.split() for line in atlas("list", "devices").out.splitlines() if line)
    for name, *numbers in lines:
        words = ",".join(f"{key}={value}" for key, value in zip(header[1:7], numbers))
        mine = parse_device(f"mine={words}")
        assert mine.memory_bytes == DEVICES[name].memory_bytes
        assert mine.up_bytes_per_second == DEVICES[name].up_bytes_per_second
        assert mine.max_rank == DEVICES[name].max_rank


def test_passes_beside_training_are_said_of_rules_and_methods(atlas) -> None:
    said = " ".join(atlas("list", "strategies").out.split())
    assert "local_only" in said, "an old name is told"
    assert said.count("passes over the training examples: one more") == 2
    assert said.count("passes over the validation examples: k more") == 1


def entries(atlas, monkeypatch) -> dict[str, list[str]]:
    """The lines of every strategy, by its name."""
    monkeypatch.setenv("COLUMNS", "400")
    by_name: dict[str, list[str]] = {}
    for line in filter(None, map(str.rstrip, atlas("list", "strategies").out.splitlines())):
        if not line.startswith(" "):
            lines = by_name[line.split()[0]] = []
        lines.append(line.strip())
    del by_name["strategy"]  # the titles
    return by_name


def test_every_strategy_is_shown_with_what_it_needs(atlas, monkeypatch) -> None:
    for name, (_, needs, *rule) in entries(atlas, monkeypatch).items():
        assert needs.startswith("needs: ") and len(needs) > len("needs: "), name
        assert (name in METHODS) == bool(rule and rule[0].startswith("rule: ")), name


def test_entries_by_hand(atlas, monkeypatch) -> None:
    found = entries(atlas, monkeypatch)
    assert found["local"][1:] == ["needs: nothing"]
    sets = "sets: second_model=proximal space=factors share=A B head"
    assert found["ditto"][1:] == [
        *("needs: equal ranks; twice the training", "rule: fedavg", "differs from its paper: whole models", sets)
    ]


@pytest.mark.parametrize("name", [*RULES, *METHODS])
def test_who_needs_equal_ranks_or_factors_refuses_others(name: str, atlas, monkeypatch) -> None:
    needs = entries(atlas, monkeypatch)[name][1]
    rule = RULES[METHODS[name].rule if name in METHODS else name]
    own = METHODS[name].settings if name in METHODS else {}
    space = rule.fixed.get("space", own.get("space", "any"))
    given = own.get("ranks", "8")
    mu = {"proximal_mu": "0.1"} if name in ("feddyn", "fedavg_dynamic") else {}

    def is_accepted(**values: str) -> bool:
        try:
            validate(with_values(Config(), {"strategy": name, "ranks": given, **mu, **values}))
        except ConfigError:
            return False
        return True

    spaces = ("product", "factors") if space == "any" else (space,)
    assert all(is_accepted(space=one) for one in spaces)
    # a default that a method replaces is no contradiction
    assert name in METHODS or is_accepted(space="product") == (space != "factors")
    assert is_accepted(space=spaces[0], ranks="budget") == (needs.split("; ")[0] not in ("needs: equal ranks",))


def test_without_a_word_it_says_what_can_be_listed(atlas) -> None:
    said = atlas("list")
    first = [line.split()[0] for line in said.out.splitlines() if line and not line.startswith(" ")]
    assert (said.code, first[1:]) == (0, list(CATALOGUES))


@pytest.mark.parametrize("name", [*RULES, *METHODS, "local_only"])
def test_a_strategy_alone_has_the_settings_that_are_its_own(name: str, atlas) -> None:
    said = atlas("list", "strategies", name)
    assert (said.code, said.err) == (0, "")
    method = METHODS.get(name)
    for setting in {} if method is None else {**method.settings, **method.suggested}:
        assert f"\n{settings()[setting].flag} " in said.out


def test_a_rule_alone_has_its_knobs(atlas) -> None:
    assert "\n--bipartition-ratio " in atlas("list", "strategies", "cfl").out
    assert {"--graph", "--eta"} <= {*atlas("list", "strategies", "atlas_laplacian").out.split()}
    assert "\n--second-gate " in atlas("list", "strategies", "fedalt").out
    used = {name for rule in RULES.values() for name in rule.uses}
    assert used <= {*settings()}


def test_every_conflict_is_listed_with_its_reason_and_remedy(atlas) -> None:
    said = atlas("list", "conflicts").out
    first = [line for line in said.splitlines() if line and not line.startswith(" ")]
    for line, row in zip(first[1:], conflicts(), strict=True):
        assert line.startswith(flag_of(row.values[0][0])), row
    assert not {"{", "}"} & set(said)
