"""The paper: its suites, tables, figures and report, the measurements of speed, and the command line of it all.

cli, command_line, commands    what people type, and what each command does
suites, bench                  the experiments by name, and how they are chosen, planned and finished
scores, tables, sheets         figures from result files, and tables as Markdown, CSV, LaTeX and JSON
significance, published        is it better, is it what the paper printed
figures, qualitative, report   what people look at
sweeps, tracking               searches as they are asked for and shown, MLflow's pages
cost, cluster_simulation       what runs will take, here and on clusters that nobody has yet
runtime, scaling, faults       measured: speed, processes, kills; also loader, cpu_settings and cross_attention
train_mini                     how the embedded CLIP was made
"""
