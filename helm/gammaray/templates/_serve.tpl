{{/* The Serve configuration: the generated one with this release's models, replicas, devices and settings. */}}
{{- define "gammaray.serveConfig" -}}
{{- $generated := include "gammaray.generated" . | fromYaml -}}
{{- $serve := include "gammaray.serve" . | fromYaml -}}
{{- $applications := list -}}
{{- range $application := $serve.applications -}}
{{- $role := get $generated.roles $application.name -}}
{{- $values := get $.Values $role -}}
{{- $args := $application.args -}}
{{- $deployment := first $application.deployments -}}
{{- $settings := $args.settings -}}
{{- if eq $role "orchestrator" -}}
{{- if contains ":" (toString $values.replicas) -}}
{{- $_ := set $args "replicas" $values.replicas -}}
{{- $_ := set $args "scaling" $.Values.scaling -}}
{{- else -}}
{{- $_ := set $args "replicas" ($values.replicas | int) -}}
{{- end -}}
{{- $_ := set $settings "model" $.Values.models.target -}}
{{- if $.Values.apiKeysSecret.name -}}
{{- $_ := set $settings "api_keys_file" (printf "/etc/gammaray/keys/%s" $.Values.apiKeysSecret.key) -}}
{{- else -}}
{{- $_ := set $settings "allowed_hosts" (include "gammaray.hosts" $) -}}
{{- end -}}
{{- with $.Values.receiptKeysSecret }}{{ if .name -}}
{{- $_ := set $settings "receipt_keys_file" (printf "/etc/gammaray/receipts/%s" .key) -}}
{{- end }}{{ end -}}
{{- else -}}
{{- $_ := set $args "workers" (toString $values.workers) -}}
{{- if include "gammaray.workersScale" $ -}}
{{- $_ := set $args "scaling" $.Values.scaling -}}
{{- end -}}
{{- $_ := set $settings "model" (get $.Values.models $role) -}}
{{- if and (eq $role "draft") (ne $.Values.models.draft $.Values.models.target) -}}
{{- $_ := set $settings "target" $.Values.models.target -}}
{{- end -}}
{{- if ne $.Values.engine "auto" -}}
{{- $_ := set $settings "engine" $.Values.engine -}}
{{- end -}}
{{- $_ := set $settings "device" (ternary "cuda" "cpu" (gt (int $values.gpus) 0)) -}}
{{- $_ := set $deployment.ray_actor_options "num_gpus" (int $values.gpus) -}}
{{- if eq $role "target" -}}
{{- $_ := set $settings "tensor_parallel" (max 1 (int $values.gpus)) -}}
{{- end -}}
{{- end -}}
{{- if $.Values.workerTls.enabled -}}
{{- $settings = mergeOverwrite $settings (dict "tls_dir" "/etc/gammaray/tls") -}}
{{- end -}}
{{- $_ := set $args "settings" (mergeOverwrite $settings $values.settings) -}}
{{- with include "gammaray.modelMarks" (dict "root" $ "role" $role) | fromJsonArray -}}
{{- $_ := set $args "after" . -}}
{{- end -}}
{{- if ne (toString $values.workers) "0" -}}
{{- $applications = append $applications $application -}}
{{- end -}}
{{- end -}}
{{- $_ := set $serve "applications" $applications -}}
{{- toYaml $serve -}}
{{- end -}}

{{/* Allowed host names of the HTTP API; checked if no API keys are configured. */}}
{{- define "gammaray.hosts" -}}
{{- $service := printf "%s-http" (include "gammaray.fullname" .) -}}
{{- $hosts := list $service -}}
{{- range list "" ".svc" ".svc.cluster.local" -}}
{{- $hosts = append $hosts (printf "%s.%s%s" $service $.Release.Namespace .) -}}
{{- end -}}
{{- if .Values.ingress.enabled -}}
{{- $hosts = concat $hosts (include "gammaray.ingressHosts" (dict "root" . "kind" "http") | fromJsonArray) -}}
{{- end -}}
{{- if .Values.gateway.enabled -}}
{{- $hosts = append $hosts .Values.gateway.httpHost -}}
{{- end -}}
{{- join "," $hosts -}}
{{- end -}}
