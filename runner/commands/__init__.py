"""The subcommands of ``kvtier``, one a module, each with ``add_to(commands)`` and ``run(args)``.

Owns       options, progress bars, and the choice of exit status and of JSON or a table.
Promises   modules that take seconds to import are imported by ``run`` only, so that help and usage errors come at once.
Does not   do the work: ``runner.demo.job``, ``runner.verify``, ``runner.plan`` and so on do, without a terminal.
"""
