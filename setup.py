"""Which folders are packages: pyproject.toml can find packages only under their own names, and most of these lie at the root."""

from setuptools import find_packages, setup

ROOTS = ("launcher", "training", "models", "parallel", "kernels", "data_pipeline", "slurm", "configs")

setup(
    packages=["baton", *(f"baton.{name}" for name in find_packages(include=[*ROOTS, *(f"{root}.*" for root in ROOTS)]))],
    package_dir={"baton": "baton", **{f"baton.{root}": root for root in ROOTS}},
)
