"""Names that were replaced, by the part of the repository whose owner replaced them.

A name stands here so that it does not come back. `WORDS` are looked for as whole words in all texts; `NAMES` as identifiers in
Python code only, because they are ordinary words in prose. Each entry has the files in which the name is looked for, as patterns
of `fnmatch` (`*` also matches `/`), and the retired names.
"""

Entry = tuple[tuple[str, ...], tuple[str, ...]]

WORDS: dict[str, Entry] = {
    "kernels": (
        ("*",),
        (
            "compile_pool.py",
            "run_chunked.py",
            "first_calls",
            "tiles.json",
            "TilesError",
            "power_of_two",
            "_tiles_for",
            "pull_back",
            "_NotMade",
            "exact_cuts",
            "in_chunks",
            "expect_leaves",
            "protocol.unwanted",
            "per_block",
            "per_run",
            "kernels/rotary/turns",
            "delta_rule/solve",
            "delta_rule/gradients",
            "in_triton",
            "plain_kernel",
            "gated_kernel",
            "turn_kernel",
            "writes_kernel",
            "dbeta_of_zeros_kernel",
        ),
    ),
    "models": (("*",), ("rms_norm_beside", "kept_not", "GatedScan", "GatedScanConfig")),
    "tests": (("*",), ("test_house",)),
    "kernels' operators": (
        ("*",),
        (
            "orthogonal_state",
            "OrthogonalState",
            "orthogonal_state_chunked",
            "orthogonal_state_triton",
            "chunk_walk",
            "short_conv_chunked",
        ),
    ),
    "parallel": (
        ("*",),
        (
            "parallel/carry",
            "parallel.carry",
            "parallel/sequence",
            "parallel.sequence",
            "parallel/exchange",
            "parallel.exchange",
            "parallel/spans",
            "parallel.spans",
            "parallel/waiting",
            "parallel.waiting",
            "parallel/layout",
            "parallel.layout",
            "SequenceLink",
            "sequence_link",
            "ExchangeError",
            "ComputeCopy",
            "drop_compute_copies",
            "adding_gradients",
            "gradients_are_added",
            "plain_weight",
            "_HandOn",
            "_ByEffect",
            "_Passage",
            "sequence_rank",
            "finalise_gradients",
        ),
    ),
    "data_pipeline": (
        ("*",),
        (
            "task_stream",
            "data_pipeline/places",
            "data_pipeline.places",
            "data_pipeline/pieces",
            "data_pipeline.pieces",
            "data_pipeline/blocks",
            "data_pipeline.blocks",
            "data_pipeline/units",
            "data_pipeline.units",
            "data_pipeline/lanes",
            "data_pipeline.lanes",
            "data_pipeline/sources",
            "data_pipeline.sources",
            "data_pipeline/source",
            "data_pipeline.source",
            "data_pipeline/tasks",
            "data_pipeline.tasks",
            "data_pipeline/claim",
            "data_pipeline.claim",
        ),
    ),
}
"""Part of the repository -> (files, names)."""

NAMES: dict[str, list[Entry]] = {
    "kernels": [
        (
            (
                "kernels/*",
                "tests/kernels/*",
                "training/*",
            ),
            (
                "Tiles",
                "SumTiles",
                "tiles=",
                ".tiles",
                "tiles_for",
                "default_tiles",
            ),
        ),
        (
            ("*.py",),
            (
                "Leaf",
                "Effect",
            ),
        ),
        (
            (
                "kernels/*",
                "parallel/*",
                "tests/kernels/*",
            ),
            (
                ".along",
                ".chaotic",
                ".early",
                ".leave",
                ".outputs",
                ".effect",
                "unwanted",
            ),
        ),
        (
            (
                "models/*",
                "training/*",
            ),
            ("noting",),
        ),
        (
            ("kernels/*",),
            (
                "loads_begun",
                "lines_of",
                "lines_from",
                "in_a_line",
                "in_rows",
            ),
        ),
        (("kernels/*",), ("_low",)),
    ],
    "models": [
        (("*.py",), ("Site", "IGNORED", "remaking", "Footprint", ".footprint", "StateLeaf", "replicated_parameter")),
        (
            ("models/*", "launcher/*"),
            ("site", "beside=", "Kept", "Carrier", "Reduction", "Work", ".carriers", ".reductions", "kept_bytes"),
        ),
    ],
    "parallel": [
        (
            ("parallel/*", "tests/parallel/*"),
            (
                "Carrier",
                "Aside",
                "Arrival",
                "expect",
                "passage",
                "global_blocks",
                "part_of",
                "own_input",
                "lends",
                "lent",
                "named_parts",
            ),
        )
    ],
    "data_pipeline": [],
    "training": [],
    "launcher": [],
    "slurm": [],
}
"""Part of the repository -> entries of (files, names): `.name` is an attribute, `name=` a keyword argument, else any identifier."""
