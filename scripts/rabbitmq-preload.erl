%% RabbitMQ needs all modules of its applications to start, and loads one after the other, each of which stops Erlang's virtual machine.
%% Loaded together they take half of the processor time of a start less. Evaluated by scripts/rabbitmq's nodes before anything else.
Specification = fun(Application) ->
    case file:consult(code:where_is_file(atom_to_list(Application) ++ ".app")) of
        {ok, [{application, _, Keys}]} -> Keys;
        {error, _} -> []
    end
end,
Add = fun Add(Application, Known) ->
    case maps:is_key(Application, Known) of
        true -> Known;
        false ->
            Keys = Specification(Application),
            lists:foldl(Add, Known#{Application => proplists:get_value(modules, Keys, [])},
                        proplists:get_value(applications, Keys, []))
    end
end,
Applications = lists:foldl(Add, #{}, [sasl, rabbit, rabbitmq_management, rabbitmq_prometheus]),
code:ensure_modules_loaded(lists:append(maps:values(Applications))).
