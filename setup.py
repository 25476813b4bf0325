"""The packages of a wheel: mxtrain, and the folder train_configs as data inside it. pyproject.toml has all the rest."""

from setuptools import find_packages, setup

CONFIGS = "mxtrain.train_configs"

setup(packages=[*find_packages(include=["mxtrain", "mxtrain.*"]), CONFIGS], package_dir={CONFIGS: "train_configs"})
