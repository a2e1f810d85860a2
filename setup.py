"""Which folders are packages: pyproject.toml can find packages only under their own names, and these lie at the root."""

from setuptools import find_packages, setup

ROOTS = ("launcher", "training", "models", "parallel", "kernels", "data_pipeline", "slurm", "configs")

setup(
    packages=[f"baton.{name}" for name in find_packages(include=[*ROOTS, *(f"{root}.*" for root in ROOTS)])],
    package_dir={f"baton.{root}": root for root in ROOTS},
)
