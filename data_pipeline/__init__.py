"""Text to tokens to shards to lanes to batches, and the cursor that resumes them.

The one thing to know: nothing here imports torch (the webdataset library does, and is imported when the first shard is opened).
In the order of a token's way:

    tokenizer         train_tokenizer, Tokenizer
    input_files       the input files of a preparation: folders are searched, links are followed
    records           the documents in an input file (formats: which format a file has; compressed, archive, parquet: reading it)
    prepare           prepare: input files to a dataset (prepare_plan: its folder and plan; prepare_workers: its worker processes;
                      shards: the format on disk)
    verify            verify, inspect
    dataset           Dataset: a prepared dataset opened for reading (storage: folders, URLs, pipes; remote: http, retries, a cache)
    lane_order        the order of documents in each lane, and Cursor (unit_index: where units begin, in one file)
    stream            BatchStream, which training reads (token_chunks: ids of long documents; batches: packing documents into rows;
                      steps: StepPlan, the rows of each step, and what every stream of lanes shares; workers, shared_memory: reading
                      in processes of their own)
    evaluation        evaluation_batches, documents
    synthetic         Examples: synthetic tasks made from random words (synthetic_stream: their lanes and evaluation sets)
    run_source        open_source: shards or a synthetic task, in the one shape that training drives
    config            DataConfig by kind: ShardsConfig, MqarConfig, InductionConfig, SelectiveCopyConfig; PrepareConfig
    files, file_io    atomic writes, checksums; transient errors of file systems, whole lines
    lock              exclusive: one process at a time, also where there is no flock
    errors            DataError, raised for every bad input
"""
