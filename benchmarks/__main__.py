"""Measure trainyard, the floors and the peers: ``python -m benchmarks [--quick] [--peers] [--only PART]``.

Every measurement runs in a fresh process; a round runs each one once, so that a machine that slows down slows all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.loggers import PEERS
from benchmarks.plan import PARTS, Measurement, plan

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / ".bench"
LIMIT_S = 600


def main() -> int:
    """The command line. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure trainyard, the floors and the peers."
    )
    parser.add_argument("--rounds", type=int, help="how often each measurement runs; default 3, with --quick 1")
    parser.add_argument("--quick", action="store_true", help="a tenth of the sizes; writes no docs")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be given again")
    parser.add_argument("--peers", action="store_true", help="install the peers below .bench/venvs first")
    args = parser.parse_args()
    rounds = args.rounds or (1 if args.quick else 3)
    parts = args.only or list(PARTS)
    if args.peers:
        install_peers()
    measurements = plan(args.quick)
    rows = run([one for one in measurements if one.part in parts], rounds)
    kept = BENCH / ("quick.jsonl" if args.quick else "results.jsonl")
    if args.only and kept.exists():  # the other parts stand as they were last measured
        known = {(one.table, one.title) for one in measurements if one.part not in parts}
        old = map(json.loads, kept.read_text().splitlines())
        rows += [row for row in old if (row["table"], row["title"]) in known]
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))

    medians = report.Medians(rows)
    for part in parts:
        print(f"\n## {PARTS[part]}\n", *report.tables(measurements, medians, part), sep="\n\n")
    print("\n## Targets\n", report.targets(medians), sep="\n")
    if not args.quick and {row["part"] for row in rows} == set(PARTS):
        # with --only, the page joins rows of several commands: it names them all
        command = "`, then `".join(
            dict.fromkeys(row.get("command", "python -m benchmarks") for row in sorted(rows, key=lambda row: row["at"]))
        )
        rounds = max(row["round"] for row in rows) + 1
        page = report.page(measurements, medians, command=command, rounds=rounds, date=time.strftime("%Y-%m-%d"))
        (ROOT / "docs" / "benchmarks.md").write_text(page, encoding="utf-8")
        report.draw(measurements, medians, ROOT / "docs" / "benchmarks.svg")
    return 0


def install_peers() -> None:
    """Make an environment for each peer; one that cannot be made is left out."""
    for name, peer in PEERS.items():
        python = _interpreter(name)
        if (
            python.exists()
            and not subprocess.run([python, "-c", f"import {peer.module}"], capture_output=True).returncode
        ):
            continue
        print(f"installing {name} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", BENCH / "venvs" / name], check=True)
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *peer.requirements])
        if done.returncode:
            print(f"{name} cannot be installed here: it is left out", file=sys.stderr)


def run(measurements: list[Measurement], rounds: int) -> list[dict[str, Any]]:
    """All rounds, part by part. Returns the rows; a measurement that failed has an ``error`` in its row."""
    rows = []
    scratch = BENCH / "work"
    scratch.mkdir(parents=True, exist_ok=True)
    for part in dict.fromkeys(one.part for one in measurements):
        chosen = [one for one in measurements if one.part == part]
        for number in range(rounds):
            for one in chosen:
                row = {"part": part, "table": one.table, "title": one.title, "round": number, **_run(one, scratch)}
                row["command"] = " ".join(["python -m benchmarks", *sys.argv[1:]])
                row["at"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                rows.append(row)
                figure = one.shown[0]
                said = row["error"] if "error" in row else f"{figure} {row[figure]:.2f}"
                print(f"{part} {number + 1}/{rounds}  {one.table}: {one.title}: {said}", file=sys.stderr)
    return rows


def _run(one: Measurement, scratch: Path) -> dict[str, Any]:
    python = _interpreter(one.peer) if one.peer else Path(sys.executable)
    if not python.exists():
        return {"error": "not installed"}
    missing = [name for name in one.needs if not one.peer and importlib.util.find_spec(name) is None]
    if missing:
        return {"error": f"needs {', '.join(missing)}"}
    asked = json.dumps({"what": one.what, "scratch": str(scratch), "options": one.options})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRAINYARD_")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # nobody's users compile at each start
    try:
        done = subprocess.run(
            [python, "-m", "benchmarks.measures", asked], cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=LIMIT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"error": f"did not end within {LIMIT_S} s"}
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return {"error": "failed"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _interpreter(peer: str) -> Path:
    folder = BENCH / "venvs" / peer
    return folder / "Scripts" / "python.exe" if os.name == "nt" else folder / "bin" / "python"


if __name__ == "__main__":
    sys.exit(main())
