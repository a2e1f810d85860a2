"""The tool that starts a SLURM on this machine."""

from support.jobs import sandbox


def test_a_node_is_found_however_long_the_list_of_nodes_goes_on_behind_it(tmp_path):
    # 20,000 names fill a pipe's 64 KiB: whoever lists them is still writing when the second one has been found
    (tmp_path / ".slurm-sandbox").touch()
    (tmp_path / "settings").write_text("NODES=20000 CPUS=2 PREFIX=n GPUS=0 ACCT=0 MEM=4096 EXTRA=''\n")
    found = sandbox("fail", "n2", SLURM_SANDBOX_DIR=str(tmp_path))
    assert (found.returncode, found.stderr) == (0, "")
    missing = sandbox("fail", "n20001", SLURM_SANDBOX_DIR=str(tmp_path))
    assert (missing.returncode, missing.stderr) == (1, "slurm-sandbox: error: no such node: n20001\n")
