"""Who runs the shards of a scoring run; every engine writes the same folder.

An engine is a function of an order (`memopd_scorer.run.Order`) that leaves a finished folder behind. `local` is one
process, `torchrun` all that torchrun started, `ray_data` a pool of actors.

One process is the folder's lead (`memopd_scorer.store`): it holds the folder, verifies what is there, says which shards
are left, and writes the manifest. The workers follow: each opens the same job with a teacher of its own, plans for
itself, and writes its shards.
"""
