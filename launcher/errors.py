"""Errors of the command line and the configuration."""


class ConfigError(Exception):
    """A configuration that cannot be used: what, where and what to do, in one line."""

    exit_status = 2
