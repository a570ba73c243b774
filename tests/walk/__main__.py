"""Print the walks and the structure: ``python -m tests.walk [NAME]``; with a walk's name, each function in it."""

import sys

from tests.multiproc.harness import run_ranks
from tests.walk import structure
from tests.walk.jobs import measure
from tests.walk.steps import PACKAGE


def main() -> None:
    """Walk, count, print."""
    walks = run_ranks(measure, 2, timeout=300.0)[0]
    for name in sys.argv[1:]:
        for (file, function), count in sorted(walks[name].calls.items()):
            sys.stdout.write(f"{count:5d} {walks[name].crossings[file, function]:5d}  {file} {function}\n")
    rows = ["| walk | files | packages | calls | calls into another file |", "| --- | --- | --- | --- | --- |"]
    for name, found in walks.items():
        numbers = found.summary()
        rows.append(f"| {name} | " + " | ".join(str(numbers[key]) for key in numbers) + " |")
    trees = structure.trees()
    files = sorted(PACKAGE.rglob("*.py"))
    core = [path for path in files if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in structure.CORE]
    chains = [chain for tree in trees.values() for chain in structure.chains(tree)]
    reach = [use for tree in trees.values() for use in structure.private_reach(tree)]
    lines = structure.lines_of(files)
    rows += [
        "",
        f"{len(files)} files, {lines:,} lines, {structure.lines_of(core):,} of them in the core; "
        f"{len(chains)} chains of {structure.HOPS} hops and more, {1000 * len(chains) / lines:.1f} per 1,000 lines; "
        f"{len(reach)} private attributes of other files.",
    ]
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
