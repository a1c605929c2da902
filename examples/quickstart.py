"""ATLAS against local training, from Python: plan, run, audit, compare.

python examples/quickstart.py            # the quick preset: minutes on two cores
python examples/quickstart.py smoke      # only to see that everything works
"""

import sys

from atlas_fl import audit_run, compare_methods, draw_all, find_preset, make_plan, run_config, with_values


def main(preset: str) -> None:
    base = with_values(find_preset(preset), {"audit": "true", "runs_dir": "runs"})

    plan = make_plan(base)  # warms the clients up and trains nothing federally
    for client in plan.clients:
        print(f"{client.name:<12}{client.device:<12}cluster {client.cluster:>2}  ranks {client.ranks}")

    folders = {}
    for strategy in ("local", "atlas"):
        result = run_config(with_values(base, {"strategy": strategy}), resume=True)
        folders[strategy] = [result.folder]
        scores = result.summary["overall"]["final"]["test"]
        print(f"{strategy}: test score {scores['primary']:.3f}, {result.summary['bytes']['total']:,} bytes sent")

    report = audit_run(folders["atlas"][0])
    print(f"audit: {len(report.rows)} checks, {len(report.failures)} failed")
    for name, row in compare_methods(folders).rows.items():
        described = row.statistics
        print(f"{name}: mean {described.mean}, worst client {described.worst_client}, hurt {described.hurt}")
    for path in draw_all(folders["atlas"][0]):
        print(path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "quick")
