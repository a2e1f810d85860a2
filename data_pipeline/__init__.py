"""Text to tokens to shards to lanes to batches, and the cursor that resumes them. Nothing here imports torch.

In the order in which data passes through them:

    tokenizer         load_tokenizer, Tokenizer (tokenizer_base; sentencepiece_tokenizer, hf_tokenizer: its kinds)
    tokenizer_training  train_tokenizer
    input_files       the input files of a preparation: folders are searched, links are followed
    records           the documents in an input file (formats: which format a file has; compressed, archive, parquet: reading it)
    prepare           prepare: input files to a dataset (prepare_plan: its folder and plan; prepare_workers: its worker processes)
    token_files       documents of token ids in others' files; webdataset_index: index_shards, others' shards as a dataset
    verify            verify, inspect
    shards            the format on disk: a tar of documents, its index, and an index of units
    dataset           Dataset: a prepared dataset opened for reading (storage: folders, URLs, pipes; remote: http, retries, a cache)
    lane_order        the order of documents in each lane, Cursor, and Mixture (the source of a lane's next unit)
    packing           Batch; documents packed into rows
    steps             StepPlan, the rows of each step; StepStream, what every stream of lanes shares
    reader            LaneReader: lanes read from cursors (workers: the same in processes of their own)
    synthetic         Examples: synthetic tasks made from random words (synthetic_stream: their lanes and evaluation sets)
    run_source        BatchStream, ShardSource, TaskSource, open_source: what a training run reads
    evaluation        evaluation_batches, documents
    config            DataConfig by kind: ShardsConfig or a task of task_config (MqarConfig, ...); PrepareConfig
    files, file_io    atomic writes and checksums; transient errors of file systems, whole lines
    lock              exclusive: one process at a time, also where there is no flock
    errors            DataError, raised for every bad input
"""
