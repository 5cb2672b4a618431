"""Second helpings: one file is one technique, which changes a step from outside.

A file may hold
    entries of menus      added when it is imported, so a flag of a step has one more value: SYNCS["torch"] = TorchSync
    class Flags           a dataclass: its own flags, with a comment each, which become fields of the run's config
    SINCE                 the Config of the step from which on these flags exist; without it, they do in all steps
    LAST                  True: attached after the others, as it wraps what they put in place
    check(config, world)  raises UserError for flags that cannot work, before anything is built
    attach(config, parts) called once before the first step; parts.model, .optimizer, .sync, .data, .mesh, .positions,
                          .pipeline (as far as the step has them) and .run may be looked at, changed, wrapped
    state(config, parts)  what a checkpoint keeps besides masters, moments and buffers: JSON holds it, all ranks alike
    restore(config, parts, state)  takes it again
"""
