"""The invariants, executable: ``run.audit`` looks at everything, each module at one part of the state."""
