"""The audit computes server states again, and finds one that was altered."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from atlas_fl.audit.check import audit_run
from atlas_fl.config.schema import MixingConfig, RobustConfig, server_config
from tests.audit.test_honest import SERVER_OPTIMIZERS
from tests.audit.written import ROUNDS, edit_tensors, found, only, only_rows, write_run


@pytest.mark.parametrize(("space", "within"), [("product", "clusters"), ("factors", "all")])
@pytest.mark.parametrize("strategy", SERVER_OPTIMIZERS)
def test_a_server_optimizer_with_other_numbers_passes_and_another_in_its_name_does_not(
    tmp_path, strategy, space, within
):
    robust, server = RobustConfig(within=within), server_config(server_lr=0.05, server_beta1=0.6, server_tau=0.02)
    mixing = MixingConfig(strategy=strategy, space=space)
    report = audit_run(write_run(tmp_path / "run", mixing, robust=robust, server=server))
    assert report.ok, report.failures[:2]
    assert [row.round for row in only_rows(report, "server")] == list(range(1, ROUNDS + 1))
    real = replace(mixing, strategy=SERVER_OPTIMIZERS[SERVER_OPTIMIZERS.index(strategy) - 1])
    report = audit_run(write_run(tmp_path / "liar", mixing, robust=robust, server=server, real=real))
    assert only(report, "server") and only(report, "mixed")


@pytest.mark.parametrize("field", ["server_lr", "server_beta1", "server_beta2", "server_tau"])
def test_other_numbers_than_the_settings_say_are_found(tmp_path, field):
    run = write_run(tmp_path / "run", MixingConfig(strategy="fedadam"))
    config = run / "config.toml"
    lines = [f"{field} = 0.5" if line.startswith(field) else line for line in config.read_text().splitlines()]
    config.write_text("\n".join(lines) + "\n")
    assert only(audit_run(run), "mixed")


@pytest.mark.parametrize("moment", ["first/all/layer.0.q", "second/all/layer.1.q", "first/task-movie/head.weight"])
def test_one_altered_value_of_a_moment_is_found(tmp_path, moment):
    run = write_run(tmp_path / "run", MixingConfig(strategy="fedyogi"))
    edit_tensors(run, 2, "server", lambda flat: flat[moment].view(-1)[3].mul_(1.01))
    report = audit_run(run)
    # the state of round 2 is wrong, and round 3 follows from another one than it says
    assert (2, "", "server") in found(report)
    assert only(report, "server")[0].detail.startswith(f"{moment} of the server state is ")
    assert {row.round for row in report.failures if row.check == "server"} <= {2, 3}


def test_a_state_that_is_missing_or_too_much_is_found(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="fedadam"))
    (run / "audit" / "round-0002" / "server.safetensors").unlink()
    assert (2, "", "server") in found(audit_run(run))
    more = write_run(tmp_path / "more", MixingConfig(strategy="fedadam"))
    edit_tensors(more, 1, "server", lambda flat: flat.update({"first/all/z": flat["first/all/layer.0.q"].clone()}))
    detail = only(audit_run(more), "server", round=1)[0].detail
    assert detail == "the server state has first/all/z, which the rule does not make"
    plain = write_run(tmp_path / "plain", MixingConfig(strategy="fedavg"))
    assert not only_rows(audit_run(plain), "server")
    source = more / "audit" / "round-0001" / "server.safetensors"
    save_file(load_file(source), plain / "audit" / "round-0002" / "server.safetensors")
    assert only(audit_run(plain), "server", round=2)


@pytest.mark.parametrize(("space", "by"), [("product", "all"), ("product", "layer"), ("factors", "layer")])
def test_rows_by_the_gram_matrix_pass_and_those_of_other_parameters_do_not(tmp_path, space, by):
    mixing, server = MixingConfig(strategy="pfedgraph", space=space), server_config(gram_by=by, gram_alpha=2.0)
    run = write_run(tmp_path / "run", mixing, server=server)
    report = audit_run(run)
    assert report.ok, report.failures[:2]
    config = run / "config.toml"
    other = "all" if by != "all" else "layer"
    config.write_text(config.read_text().replace(f'gram_by = "{by}"', f'gram_by = "{other}"'))
    assert only(audit_run(run), "mixed")
    config.write_text(config.read_text().replace("gram_alpha = 2.0", "gram_alpha = 0.7"))
    assert only(audit_run(run), "mixed")
    liar = write_run(tmp_path / "liar", mixing, server=server, real=replace(mixing, strategy="fedavg"))
    assert only(audit_run(liar), "mixed") and only(audit_run(liar), "server")


def test_another_first_model_than_that_of_round_zero_is_found(tmp_path):
    run = write_run(tmp_path / "run", MixingConfig(strategy="pfedgraph"))
    for round in (0, 1, 2, 3):
        edit_tensors(run, round, "server", lambda flat: flat["initial/movie-0/layer.0.q.lora_B"][0, 0].add_(0.5))
    report = audit_run(run)
    assert (0, "", "server") in found(report)
    edit_tensors(run, 0, "server", lambda flat: flat["initial/movie-0/layer.0.q.lora_B"][0].sub_(0.5))
    assert (1, "", "server") in found(audit_run(run))


@pytest.mark.parametrize(
    ("strategy", "numbers"),
    [("cfl", {"bipartition_ratio": 1.0, "bipartition_round": 0}), ("fedtreelora", {"tree_step": 2})],
)
@pytest.mark.parametrize(("space", "norm"), [("product", 20.0), ("factors", 4.0)])
def test_clusters_by_updates_pass_and_those_of_other_numbers_do_not(tmp_path, space, norm, strategy, numbers):
    mixing = MixingConfig(strategy=strategy, space=space)
    server = server_config(**numbers, bipartition_norm=norm, tree_threshold=0.0)
    run = write_run(tmp_path / "run", mixing, server=server)
    report = audit_run(run)
    assert report.ok, report.failures[:2]
    clusters = load_file(run / "audit" / "round-0001" / "server.safetensors").values()
    assert len({int(cluster) for cluster in clusters}) > 1, "something was cut"
    liar = write_run(tmp_path / "liar", mixing, server=server, real=replace(mixing, strategy="fedavg"))
    assert only(audit_run(liar), "mixed") and only(audit_run(liar), "server")
    config = run / "config.toml"
    for name, number in (("bipartition_ratio", 1e-6), ("tree_threshold", 0.9)):
        config.write_text(config.read_text().replace(f"{name} = {getattr(server, name)}", f"{name} = {number}"))
    assert only(audit_run(run), "server")
