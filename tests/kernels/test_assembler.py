"""Which ptxas Triton's kernels are made with."""

import subprocess
import sys

import pytest

from baton.kernels.compile import assembler

SAYS = """
from baton.kernels.compile.assembler import use_sound_assembler
use_sound_assembler()
from triton.backends.nvidia.compiler import get_ptxas
print(get_ptxas(90).path)
"""


def taken(**settings):
    command, settings = [sys.executable, "-P", "-c", SAYS], {"PATH": "/usr/bin:/bin", **settings}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=settings).stdout.strip()


def test_kernels_for_hopper_are_made_by_a_ptxas_that_makes_them_right():
    said = subprocess.run([taken(), "--version"], capture_output=True, text=True, check=True).stdout
    assert assembler.version_of(said.partition("release ")[2].partition(",")[0]) >= assembler.SOUND


def test_the_users_choice_is_kept():
    from triton import knobs

    own = knobs.nvidia.ptxas_blackwell.path
    assert taken(**{assembler.SETTING: own}) == own


@pytest.mark.parametrize(("driver", "used"), [(None, True), ((13, 0), True), ((12, 9), False)])
def test_a_driver_of_an_older_major_version_cannot_load_what_it_makes(driver, used):
    assert (assembler.installed(driver) is not None) == used
