"""Text to tokens to shards to lanes to batches, and the cursor that resumes them.

The one thing to know: nothing here imports torch (the webdataset library does, and is imported when the first shard is opened).
In the order of a token's way:

    tokenizer   train_tokenizer, Tokenizer
    sources     input files: folders searched, links followed
    records     the documents in them (formats: what a file is; compressed, archive, parquet: reading it)
    prepare     prepare: inputs to a dataset (claim: its folder and plan; tasks: its worker processes; shards: the format on disk)
    verify      verify, inspect
    dataset     Dataset: a prepared dataset opened for reading (places: folders, URLs and pipes; remote: http, retries, a cache)
    lanes       which documents come when, and Cursor (units: where the units of all shards begin, in one file that a start reads)
    stream      BatchStream: what training reads (pieces: ids of long documents; batches: cutting documents into rows; steps: what
                every stream of lanes shares, and StepPlan, the rows of each step)
    evaluation  evaluation_batches, documents
    synthetic   Examples: tasks made from random words (task_stream: TaskStream and task_set, their lanes and evaluation sets)
    source      open_source: shards or a task, in the one shape that training drives
    config      DataConfig by kind: ShardsConfig, MqarConfig, InductionConfig, SelectiveCopyConfig; PrepareConfig
    lock        exclusive: one process at a time, also where there is no flock
    errors      DataError, raised for every bad input
"""
